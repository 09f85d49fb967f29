"""The token tree, selections, the contract of strategies, and functions of the caller: no model and no request."""
