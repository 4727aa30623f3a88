mod decode;
