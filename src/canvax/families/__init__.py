"""Families of models: what a checkpoint of each holds, and what its denoiser is conditioned on."""
