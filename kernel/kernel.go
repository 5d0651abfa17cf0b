// Package kernel brings in the Linux kernel that Garboard boots: where it comes from, and which of its modules come
// along.
//
// It is the kernel package of one release of Debian (package deb), whatever the build machine runs, unchanged and
// signed by its publisher, fetched and verified by apt. Of its modules (390 MB) the ones that a Kubernetes node can use
// are kept: the table Modules names them with a reason each, and Select closes the list over what they need. A module
// in the table that the kernel lacks is an error, so that an update can't remove a driver without notice.
package kernel

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/garboard-os/garboard/kernel/deb"
)

// AptPackages are what the build machine must have installed for Fetch to work.
var AptPackages = append([]string{"kmod"}, deb.AptPackages...)

// Flavour is one of the builds in which Debian publishes its kernel.
type Flavour string

const (
	// Cloud is the small build for virtual machines: virtio, NVMe, the hypervisors' own devices.
	Cloud Flavour = "cloud"
	// Generic is the build that also drives bare metal.
	Generic Flavour = "generic"
)

// Flavours lists what Fetch accepts.
var Flavours = []Flavour{Cloud, Generic}

// metaPackages names, per flavour, the package that always depends on the newest kernel.
var metaPackages = map[Flavour]string{Cloud: "linux-image-cloud-amd64", Generic: "linux-image-amd64"}

// Tested is, per flavour, the package that this checkout was tested with. Debian's archive keeps only the newest
// version: a build gets that, and reports that it is another one (Differs).
var Tested = map[Flavour]string{
	Cloud:   "linux-image-6.12.118+deb13-cloud-amd64=6.12.118-1@sha256:07f23ba1de88377d700e1e2f5b2ee495ff89b0d0bb73fdbd3eac8f6b27609b9a",
	Generic: "linux-image-6.12.118+deb13-amd64=6.12.118-1@sha256:57dee9124ac6c57b75a8aed09052245942027dd46649d3d02285c35c11cfda98",
}

// Differs tells how the packages differ from the tested ones; "" where they are the same.
func Differs(flavour Flavour, packages []deb.Package) string {
	if got := strings.Join(deb.Keys(packages), " "); got != Tested[flavour] {
		return fmt.Sprintf("the kernel is %s; this checkout was tested with %s", got, Tested[flavour])
	}
	return ""
}

// Kernel is a kernel on disk, ready to be put into an image.
type Kernel struct {
	// Release is what uname -r prints on it, and the name of its module folder.
	Release string `json:"release"`
	// Packages are the keys of the packages that it came from.
	Packages []string `json:"packages"`

	dir string
}

// Image is the path of the bootable kernel.
func (k *Kernel) Image() string { return filepath.Join(k.dir, "vmlinuz") }

// ModulesDir is the path of the module folder, to be placed at /usr/lib/modules/<release>. It holds the uncompressed
// modules and the indexes that depmod wrote for exactly these.
func (k *Kernel) ModulesDir() string { return filepath.Join(k.dir, "lib/modules", k.Release) }

// manifest is the file that makes a folder written by Fetch complete; it is written last.
const manifest = "kernel.json"

// Open reads back what Fetch wrote to dir.
func Open(dir string) (*Kernel, error) {
	data, err := os.ReadFile(filepath.Join(dir, manifest))
	if err != nil {
		return nil, fmt.Errorf("open kernel: %w", err)
	}
	k := &Kernel{dir: dir}
	if err := json.Unmarshal(data, k); err != nil {
		return nil, fmt.Errorf("open kernel %s: %w", dir, err)
	}
	return k, nil
}

// Resolve finds the package with the newest kernel of a flavour: what the meta package, which is empty, depends on.
func Resolve(ctx context.Context, lists deb.Lists, flavour Flavour) ([]deb.Package, error) {
	name, ok := metaPackages[flavour]
	if !ok {
		return nil, fmt.Errorf("resolve kernel: unknown flavour %q (known: %v)", flavour, Flavours)
	}
	carriesKernel := func(name string) bool { return strings.HasPrefix(name, "linux-image-") }
	packages, err := lists.Closure(ctx, carriesKernel, name)
	if err == nil && len(packages) == 1 {
		err = fmt.Errorf("%s %s depends on no kernel package", name, packages[0].Version)
	}
	if err != nil {
		return nil, fmt.Errorf("resolve %s kernel: %w", flavour, err)
	}
	return packages[1:], nil
}

// Fetch downloads the packages that Resolve found for a flavour, and leaves the kernel's image and the curated modules
// in dir, which must be empty.
func Fetch(ctx context.Context, lists deb.Lists, flavour Flavour, packages []deb.Package, dir string) (*Kernel, error) {
	unpacked, err := os.MkdirTemp(dir, ".unpacked-")
	if err != nil {
		return nil, fmt.Errorf("fetch %s kernel: %w", flavour, err)
	}
	defer os.RemoveAll(unpacked)
	if err := lists.Fetch(ctx, unpacked, packages...); err != nil {
		return nil, fmt.Errorf("fetch %s kernel: %w", flavour, err)
	}
	k := &Kernel{Packages: deb.Keys(packages), dir: dir}
	if err := k.take(ctx, flavour, unpacked); err != nil {
		return nil, fmt.Errorf("fetch %s kernel: %w", flavour, err)
	}
	return k, nil
}

// take moves image and modules from an unpacked package to where they stay.
func (k *Kernel) take(ctx context.Context, flavour Flavour, unpacked string) error {
	images, err := filepath.Glob(filepath.Join(unpacked, "boot/vmlinuz-*"))
	if err != nil {
		return err
	}
	if len(images) != 1 {
		return fmt.Errorf("the packages hold %d kernel images, want 1", len(images))
	}
	k.Release = strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	if err := os.Rename(images[0], k.Image()); err != nil {
		return err
	}
	// The package has usr/lib/modules, and depmod wants lib/modules.
	if err := os.Symlink("usr/lib", filepath.Join(unpacked, "lib")); err != nil {
		return err
	}
	if err := depmod(ctx, unpacked, k.Release); err != nil {
		return err
	}
	all := filepath.Join(unpacked, "lib/modules", k.Release)
	files, err := Select(all, flavour, Modules())
	if err != nil {
		return err
	}
	if err := copyModules(files, all, k.ModulesDir()); err != nil {
		return err
	}
	if err := depmod(ctx, k.dir, k.Release); err != nil {
		return err
	}
	if err := pruneIndexes(k.ModulesDir()); err != nil {
		return err
	}
	data, err := json.MarshalIndent(k, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(k.dir, manifest), append(data, '\n'), 0o644)
}

// depmod writes the indexes for the modules below base/lib/modules/release.
func depmod(ctx context.Context, base, release string) error {
	path, err := exec.LookPath("depmod")
	if err != nil {
		// Debian keeps it in a folder that isn't on a normal user's PATH.
		path = "/usr/sbin/depmod"
	}
	cmd := exec.CommandContext(ctx, path, "-b", base, release)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, out)
	}
	return nil
}

// pruneIndexes removes what depmod writes for nobody on a node: the symbol tables. The binary indexes stay, for the
// modprobe in containers that mount /lib/modules.
func pruneIndexes(modules string) error {
	for _, name := range []string{"modules.symbols", "modules.symbols.bin", "modules.builtin.modinfo"} {
		if err := os.RemoveAll(filepath.Join(modules, name)); err != nil {
			return err
		}
	}
	return nil
}
