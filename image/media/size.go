package media

import (
	"fmt"
	"os"

	"github.com/garboard-os/garboard/boot"
)

// spare is what the EFI system partition has besides the systems in both slots: boot loaders, and the file system's own
// tables.
const spare = 8 << 20

// CheckSize refuses a system of which the EFI system partition has no room for two.
func (o Options) CheckSize(say func(line string)) error {
	archive, err := o.initramfs()
	if err != nil {
		return err
	}
	linux, err := os.Stat(o.Kernel)
	if err != nil {
		return err
	}
	size := linux.Size() + int64(len(archive))
	for _, v := range boot.Volumes {
		if v.Label == boot.LabelEFI {
			if limit := (v.Size - spare) / 2; size > limit {
				return fmt.Errorf("the system has %d MB, and a disk has room for %d MB: remove files from the root file system", size/1e6, limit/1e6)
			}
			if limit := (v.Small - spare) / 2; size > limit {
				say(fmt.Sprintf("the system has %d MB: it is too large for disks below 8 GiB, and for those that begin as an image of the kind disk: they have room for %d MB", size/1e6, limit/1e6))
			}
		}
	}
	say(fmt.Sprintf("the system has %d MB", size/1e6))
	return nil
}
