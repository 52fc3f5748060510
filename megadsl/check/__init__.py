"""Proofs over a plan, before any code is built: see docs/verification.md for what is proved, tested and assumed."""
