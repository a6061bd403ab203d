"""The APIs that clients speak: each read into a chat request, and a chat turn written back in its words."""
