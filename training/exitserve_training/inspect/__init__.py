"""What hidden states hold, layer by layer: measures and plots of `exitserve inspect`."""
