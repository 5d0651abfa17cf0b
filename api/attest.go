package api

// DisksOpen is what a node extends PCR 11 with when its disks are open. From then on, the TPM gives their keys to
// nobody.
const DisksOpen = "garboard: the disks are open"
