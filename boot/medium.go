package boot

import (
	"context"
	"errors"
	"io/fs"
)

const (
	// MediumLabel is the label of a medium without a configuration.
	MediumLabel = "GARBOARD"
	// ISOLabel as the value of garboard.config= means the volume of that label that has
	// ISOFile. ISOArgument is the whole kernel parameter.
	ISOLabel = "metal-iso"
	ISOFile  = "config.yaml"
	// ISOSum beside it has its checksum, as sha256sum(1) prints it. Media that gbctl makes have one.
	ISOSum = ISOFile + ".sha256"
	// BundleFile on either volume is an archive with container images.
	BundleFile  = "images.tar"
	ISOArgument = ParamConfig + "=" + ISOLabel
)

// FirstHostname is the machine's name until networkd gives it one.
const FirstHostname = "garboard"

// ErrNone is the error of a source without a configuration, and of a volume that isn't there.
var ErrNone = errors.New("no configuration")

// Mounter calls use with the files of the volume with a file system label, mounted
// read-only until use returns. The error is ErrNone if there is no such volume.
type Mounter func(ctx context.Context, label string, use func(fs.FS) error) error
