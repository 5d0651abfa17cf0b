package main

import (
	"fmt"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runc/libcontainer/configs"
)

// withheld are the capabilities that reach past every namespace, for which a node
// has no honest use: the clock and the kernel are the host's.
var withheld = map[capability.Cap]bool{
	capability.CAP_SYS_TIME:   true,
	capability.CAP_SYS_MODULE: true,
}

// nodeCapabilities is all that we have ourselves (a virtual machine's root may
// lack some), without the withheld ones.
func nodeCapabilities() (*configs.Capabilities, error) {
	own, err := capability.NewPid2(0)
	if err != nil {
		return nil, fmt.Errorf("own capabilities: %w", err)
	}
	if err := own.Load(); err != nil {
		return nil, fmt.Errorf("own capabilities: %w", err)
	}
	supported, err := capability.ListSupported()
	if err != nil {
		return nil, fmt.Errorf("capabilities of the kernel: %w", err)
	}
	var names []string
	for _, c := range supported {
		if own.Get(capability.EFFECTIVE, c) && own.Get(capability.BOUNDING, c) && !withheld[c] {
			names = append(names, "CAP_"+strings.ToUpper(c.String()))
		}
	}
	return &configs.Capabilities{Bounding: names, Effective: names, Permitted: names}, nil
}
