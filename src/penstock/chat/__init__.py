"""Chats: conversations become tokens with loss weights, and a certificate of what is trained."""
