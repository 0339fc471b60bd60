import re,subprocess,sys
R='/tmp/w3/fir/runs/'
out=subprocess.run([sys.executable,'-m','benchmarks.outside',*[R+x for x in sys.argv[1:]],'--out','docs/results/outside.csv'],capture_output=True,text=True,check=True).stdout
lines=[]
for i,l in enumerate(out.strip().splitlines()):
    c=[x.strip() for x in l.strip().strip('|').split('|')]
    if i==1: c=['---']*len(c)
    if i>1: c[1]=f'`{c[1]}`'; c[4]=f'`{c[4]}`'
    lines.append('| '+' | '.join(c)+' |')
t='\n'.join(lines)+'\n'
p='docs/results/attacking.md'; s=open(p).read()
if 'OUTSIDE_TABLE\n' in s: s=s.replace('OUTSIDE_TABLE\n',t+'\n')
else:
    a=s.index('| task | training | measure'); m=re.match(r'(?:\|.*\n)+',s[a:]); s=s[:a]+t+s[a+m.end():]
open(p,'w').write(s); print(t)
