"""Rewriting Apex scripts for halfstep or for torch: the names, and the codemods."""
