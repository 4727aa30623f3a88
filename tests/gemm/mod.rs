mod linear;
