"""The facts: number formats, policies, op tables, errors. Imports nothing else of ours."""
