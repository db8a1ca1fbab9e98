"""Turns token ids into token ids on one device; knows no network service and no text."""
