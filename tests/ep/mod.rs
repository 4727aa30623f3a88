mod eplb;
