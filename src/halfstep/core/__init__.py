"""The facts: number formats, policies, op tables, errors. Imports no other room."""
