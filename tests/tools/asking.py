"""A client of a service that asks for one row after the other until it is ended.

Its arguments are the address, the file of its token, a file of ids that may change meanwhile, and
the file of what it was answered, one JSON object a line.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

_PAUSE_S = 0.2


def main(address, token, ids, answers):
    shown = Path(token).read_text().strip()
    headers = {"Authorization": f"Bearer {shown}", "Content-Type": "application/json"}
    number = 0
    print("asking", flush=True)
    with Path(answers).open("a", encoding="utf-8") as file:
        while True:
            known = Path(ids).read_text(encoding="utf-8").split()
            number += 1
            each = known[number % len(known)]
            body = json.dumps({"ids": [each]}).encode()
            request = urllib.request.Request(address + "/predict", body, headers)
            asked = time.time()
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    status, told = answer.status, json.loads(answer.read())
            except urllib.error.HTTPError as refusal:
                with refusal:
                    status, told = refusal.code, json.loads(refusal.read())
            except OSError as error:
                status, told = 0, {"error": type(error).__name__}
            line = {"asked": asked, "answered": time.time(), "id": each, "status": status}
            print(json.dumps(line | {"told": told}), file=file, flush=True)
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
