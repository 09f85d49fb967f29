"""What the process may use, and what nothing may cut in two: memory, forks, Ctrl-C and child processes."""
