"""What hidden states hold, layer by layer: measures and plots."""
