"""Generates many images on one machine or many: files of prompts, Ray, several hosts. canvax has no scheduler."""
