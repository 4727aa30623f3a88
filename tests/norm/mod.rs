mod rms_norm;
