"""Images: conversion between arrays and PIL, grids, and the metadata in image files."""
