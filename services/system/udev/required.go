package udev

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
	"golang.org/x/sys/unix"
	"gopkg.in/yaml.v3"
)

//go:embed required.yaml
var requiredYAML []byte

// required are modules that a node needs and that no device asks for. The
// kernel requests most of them itself at their first use (file systems, kinds
// of links, expressions of nftables; see Modprobe). But each request starts a
// process, and some are never requested. They are loaded in this order, one at
// a time, after the modules of the devices, while the node continues to start.
var required = func() (all []struct{ Name, Why string }) {
	_ = yaml.Unmarshal(requiredYAML, &all) // a test reads it
	return all
}()

// Modprobe loads what the kernel requests: the name of a module, or an alias
// such as fs-xfs. PID 1 is the kernel's modprobe (kernel.modprobe in
// Documentation/admin-guide/sysctl/kernel.rst), so this runs in a separate
// process, which the kernel starts and waits for.
func Modprobe(name string) error {
	m, err := RunningModules("/")
	if err != nil {
		return err
	}
	return m.modprobe(name)
}

func (m *Modules) modprobe(name string) error {
	if err := m.Load(name); !errors.Is(err, ErrNoModule) {
		return err
	}
	loaded, err := m.LoadFor(name)
	if len(loaded) == 0 && err == nil {
		return fmt.Errorf("load module %s: %w", name, ErrNoModule)
	}
	return err
}

// openNodes may be opened by all users: their drivers check permissions
// themselves (Documentation/networking/tuntap.rst, filesystems/fuse.rst).
var openNodes = []string{"fuse", "net/tun"}

// makeStaticNodes makes device nodes whose modules the kernel loads when they
// are first opened (modules.devname, of depmod(8)): /dev/fuse, /dev/net/tun and
// others. dev is /dev.
func makeStaticNodes(modulesDir, dev string) error {
	data, err := os.ReadFile(filepath.Join(modulesDir, "modules.devname"))
	if err != nil {
		return boot.IgnoreMissing(err)
	}
	var errs []error
	for line := range strings.Lines(string(data)) {
		node, ok := parseStaticNode(line)
		if !ok {
			continue
		}
		path := filepath.Join(dev, node.name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			errs = append(errs, err)
			continue
		}
		// Chmod, because the umask applies to mknod(2).
		err := unix.Mknod(path, node.mode, int(unix.Mkdev(node.major, node.minor)))
		if err == nil {
			err = os.Chmod(path, os.FileMode(node.mode).Perm())
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			errs = append(errs, fmt.Errorf("make node %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

type staticNode struct {
	name         string
	mode         uint32
	major, minor uint32
}

// parseStaticNode reads "fuse fuse c10:229": module, name, kind and numbers.
func parseStaticNode(line string) (n staticNode, ok bool) {
	var module string
	var kind rune
	_, err := fmt.Sscanf(line, "%s %s %c%d:%d", &module, &n.name, &kind, &n.major, &n.minor)
	mode, known := map[rune]uint32{'c': unix.S_IFCHR, 'b': unix.S_IFBLK}[kind]
	if n.mode = mode | 0o600; slices.Contains(openNodes, n.name) {
		n.mode |= 0o666
	}
	return n, err == nil && known && filepath.IsLocal(n.name)
}
