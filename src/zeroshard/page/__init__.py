"""Shared parts of zeroshard's HTML pages: each is one self-contained file, which works offline."""
