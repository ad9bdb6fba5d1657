"""Generation: typed requests and episodes, the engines that serve them, and where each request goes."""
