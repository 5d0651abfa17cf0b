package netboot

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Configs are the configurations of machines: one file for all of them, or a directory with one file for each.
//
//	52-54-00-12-34-56.yaml                       a hardware address, with - or :
//	CZ1234ABCD.yaml                              a serial number
//	4c4c4544-0051-3810-8052-b4c04f4a4d31.yaml    a UUID
//	default.yaml                                 all other machines
//
// Upper and lower case are the same. Files are read when a machine asks, so that they can be changed and added
// meanwhile.
type Configs struct{ File, Dir string }

const (
	configSuffix = ".yaml"
	defaultName  = "default"
)

var uuidName = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Paths are the files that there are now.
func (c *Configs) Paths() ([]string, error) {
	if c.Dir == "" {
		return []string{c.File}, nil
	}
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && filepath.Ext(e.Name()) == configSuffix {
			paths = append(paths, filepath.Join(c.Dir, e.Name()))
		}
	}
	return paths, nil
}

// machine is the name of a machine in the form in which names are compared.
func machine(name string) string {
	if mac, err := net.ParseMAC(name); err == nil {
		return mac.String()
	}
	return strings.ToLower(name)
}

func nameOf(path string) string {
	return machine(strings.TrimSuffix(filepath.Base(path), configSuffix))
}

// bySerial reports whether a file has the name of a serial number.
func (c *Configs) bySerial() bool {
	paths, _ := c.Paths()
	if c.Dir == "" {
		paths = nil
	}
	for _, path := range paths {
		name := nameOf(path)
		if _, err := net.ParseMAC(name); err != nil && name != defaultName && !uuidName.MatchString(name) {
			return true
		}
	}
	return false
}

// find returns the configuration for the first of a machine's names that has one, or else the default, or else nil.
// What a machine says is only compared with names of files, so that it can't ask for others.
func (c *Configs) find(names ...string) (file string, text []byte, err error) {
	paths, err := c.Paths()
	if err != nil {
		return "", nil, err
	}
	if c.Dir == "" {
		text, err = os.ReadFile(c.File)
		return c.File, text, err
	}
	byName := map[string][]string{}
	for _, path := range paths {
		byName[nameOf(path)] = append(byName[nameOf(path)], path)
	}
	for _, name := range append(names, defaultName) {
		switch found := byName[machine(name)]; {
		case name == "" || len(found) == 0:
			continue
		case len(found) > 1:
			return "", nil, fmt.Errorf("%s are for the same machine: remove all but one", strings.Join(found, " and "))
		default:
			text, err = os.ReadFile(found[0])
			return found[0], text, err
		}
	}
	return "", nil, nil
}

// readableByOthers are permissions that a file with keys must not have.
const readableByOthers = 0o077

// Warning says that other users of this machine can read a configuration; "": they can't.
func Warning(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil || info.Mode()&readableByOthers == 0 {
		return "", err
	}
	return fmt.Sprintf("%s contains keys, and other users can read it (mode %04o): chmod 600 %s", path, info.Mode().Perm(), path), nil
}
