"""Matrix products, attention and convolution, each in the form that suits the target platform."""
