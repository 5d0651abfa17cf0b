package esp

const (
	// MediumFile is the file of a medium that describes the system on it, as JSON.
	MediumFile = "garboard.json"
	// InstallDir has this file, and the system, in an installer image.
	InstallDir = "usr/install"
)

// Medium describes the system on a medium: a part of one of its files, so that the medium has it only once.
type Medium struct {
	Version string `json:"version"`
	File    string `json:"file"`
	Offset  int64  `json:"offset"` // bytes
	Size    int64  `json:"size"`
	SHA256  string `json:"sha256"` // in hexadecimal digits
	// From is the oldest release that can be upgraded to this one.
	From string `json:"from,omitempty"`
}
