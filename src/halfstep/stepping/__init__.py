"""One optimizer: what happens before and after its backward passes, and its step, taken or skipped."""
