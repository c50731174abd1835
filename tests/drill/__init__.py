"""The drill: breaks a part of a real gateway, and prints what is said, after how many seconds, and how it ends."""
