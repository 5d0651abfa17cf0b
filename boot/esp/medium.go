package esp

const (
	// MediumFile is the file of a medium that describes the system on it, as JSON.
	MediumFile = "garboard.json"
	// KernelFile is the file of the kernel in an installer image.
	KernelFile = "vmlinuz"
	// InstallDir has this file, and the system, in an installer image.
	InstallDir = "usr/install"
	// InstallerLabel marks an installer image among others. Images that are built from it inherit the mark.
	InstallerLabel = "garboard.dev/installer"
)

// Medium describes the system on a medium: a part of one of its files, so that the medium has it only once.
type Medium struct {
	Version string `json:"version"`
	File    string `json:"file"`
	Offset  int64  `json:"offset"` // bytes
	Size    int64  `json:"size"`
	SHA256  string `json:"sha256"` // in hexadecimal digits
	// Kernel is the SHA-256 of the kernel in it. In an installer image, the file KernelFile is the same, or a kernel
	// that is to replace it.
	Kernel string `json:"kernel,omitempty"`
	// Archive is the SHA-256 of the initramfs, and Program that of PID 1's program in it. Arch is that of the machines
	// that they are for. They are in signed descriptions only.
	Archive string `json:"initramfs,omitempty"`
	Program string `json:"program,omitempty"`
	Arch    string `json:"arch,omitempty"`
	// Modules is the release of the kernel that its modules are for.
	Modules string `json:"modules,omitempty"`
	// From is the oldest release that can be upgraded to this one.
	From string `json:"from,omitempty"`
	// Images are container images that the system runs pods with, whatever its configuration is.
	Images []string `json:"images,omitempty"`
}
