"""Matrix products, attention and convolution in the form that suits the platform compiled for."""
