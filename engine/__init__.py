"""Turns token ids into token ids on one device, without any network service or text."""
