"""What a run leaves: its rounds, the tokens at its nodes, its inputs, and files made of them."""
