"""What to demote and what to promote: pure numpy, no state, no tensor."""
