"""`exitserve plan`: what exits can give a model, before anything is trained."""
