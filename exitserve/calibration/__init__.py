"""`exitserve calibrate`: chooses thresholds on text, and tests what they promise on other text."""
