"""Chapter 5 of the thesis, corrected: P0 and P1 hold shares; P2 deals and sees permuted values.

party:          operations of all parties: sharing, products, questions to P2
thesis, fast:   the two modes: opening and multiplication of tensors, dealing ahead of time
trio:           a party of a mode, or all three in one process
network:        inference and training of fully connected networks, a program for all three
training:       the same training, exchange by exchange, as a session runs it
private_module: conversion of a torch module to a private module: `vfl.mpc.private`
intersection:   rows that two parties share, without disclosing which they are
"""
