"""Attention kernels behind one signature, the window, and the merge of partials."""
