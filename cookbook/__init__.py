"""Parts of the recipe book. Imports point downwards only:

compose   cli                                                        (and train.py)
parts     engine  data  models  objectives  optim  checkpoint  metrics    do not import one another
plan      plan  launch                                               no torch
words     recipe  strategy  machine  files                           no torch
"""
