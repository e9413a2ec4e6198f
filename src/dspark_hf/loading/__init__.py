"""
Reading drafter checkpoints: files, dialects, tensors. One layout is written (ours), several are
read.
"""
