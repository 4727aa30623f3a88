mod sort;
