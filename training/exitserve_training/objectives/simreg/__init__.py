"""SimReg, and the contrastive losses that its paper compares it with (table 1)."""
