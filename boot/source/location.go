package source

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/boot"
)

// Places of what identifies a machine. Only physical network interfaces have a link "device".
const (
	productUUID    = "/sys/class/dmi/id/product_uuid"
	productSerial  = "/sys/class/dmi/id/product_serial"
	kernelHostname = "/proc/sys/kernel/hostname"
	interfaces     = "/sys/class/net"
)

// What a machine doesn't have from its start on.
var (
	errNoHostname  = errors.New("the machine has no hostname yet")
	errNoInterface = errors.New("the machine has no network interface yet")
)

// variable is a part of a URL that stands for a property of the machine.
var variable = regexp.MustCompile(`\$\{[^}]*\}`)

// expand fills in the variables of a URL: ${uuid}, ${serial}, ${mac} and ${hostname}.
func (o Options) expand(location string) (string, error) {
	values := map[string]func() (string, error){
		"${uuid}":     func() (string, error) { text, err := o.readText(productUUID); return strings.ToLower(text), err },
		"${serial}":   func() (string, error) { return o.readText(productSerial) },
		"${mac}":      o.firstMAC,
		"${hostname}": o.hostname,
	}
	var problem error
	expanded := variable.ReplaceAllStringFunc(location, func(name string) string {
		value, known := values[name]
		if !known {
			problem = errors.Join(problem, fmt.Errorf("%s in %s: known are ${uuid}, ${serial}, ${mac} and ${hostname}", name, boot.ParamConfig))
			return ""
		}
		text, err := value()
		if err != nil {
			problem = errors.Join(problem, fmt.Errorf("%s in %s: %w", name, boot.ParamConfig, err))
		}
		return strings.ReplaceAll(url.QueryEscape(text), "+", "%20")
	})
	return expanded, problem
}

// readText reads a file of one line.
func (o Options) readText(name string) (string, error) {
	data, err := readFile(o.Root, name)
	text := strings.TrimSpace(string(data))
	if err != nil {
		return "", errors.New(err.Error()) // not boot.ErrNone: the URL can't be made
	}
	if text == "" {
		return "", fmt.Errorf("%s is empty", name)
	}
	return text, nil
}

// hostname is the one that DHCP or the boot loader has given to the machine.
func (o Options) hostname() (string, error) {
	name, err := o.readText(kernelHostname)
	if err == nil && (name == "(none)" || name == "localhost" || name == boot.FirstHostname) {
		err = errNoHostname
	}
	return name, err
}

// firstMAC is the hardware address of the first physical network interface, by name.
func (o Options) firstMAC() (string, error) {
	found, err := fs.Glob(o.Root, strings.TrimPrefix(path.Join(interfaces, "*", "device"), "/"))
	if err != nil {
		return "", err
	}
	if len(found) == 0 {
		return "", errNoInterface
	}
	slices.Sort(found)
	return o.readText("/" + path.Join(path.Dir(found[0]), "address"))
}
