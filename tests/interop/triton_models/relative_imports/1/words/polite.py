HELLO = "Good day"
