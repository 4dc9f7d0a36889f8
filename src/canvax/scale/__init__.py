"""Many images, on one machine or many: files of prompts, Ray, several hosts. canvax brings no scheduler of its own."""
