"""Codemods that rewrite Apex scripts for halfstep or torch, and the table of names."""
