"""The step's arithmetic: optimizers, the learning rate as a function of the step, the average of the weights."""
