"""Backends: one loaded model on one device, behind one contract (contract.py)."""
