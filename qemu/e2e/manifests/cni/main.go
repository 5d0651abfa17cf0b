// Cni is the part of a pod network on each node, as users install it: in a pod it
// copies a plugin and its configuration to containerd's directories, and keeps
// running. It is the plugin too: the node's own `bridge`, under another name.
//
//	cni install SUBNET-FILE PLUGINS CONFIGURATIONS
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	name = "e2e"
	// lookEvery: flannel writes its subnet within seconds.
	lookEvery = 200 * time.Millisecond
)

func main() {
	var err error
	switch {
	case os.Getenv("CNI_COMMAND") != "": // CNI specification, section 2
		err = plugin()
	case len(os.Args) == 5 && os.Args[1] == "install":
		err = install(os.Args[2], os.Args[3], os.Args[4])
	default:
		err = errors.New("usage: cni install SUBNET-FILE PLUGINS CONFIGURATIONS")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// plugin passes everything on to bridge.
func plugin() error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	var conf map[string]any
	if err := json.Unmarshal(text, &conf); err != nil {
		return err
	}
	conf["type"] = "bridge"
	if text, err = json.Marshal(conf); err != nil {
		return err
	}
	bridge := exec.Command(filepath.Join(filepath.SplitList(os.Getenv("CNI_PATH"))[0], "bridge"))
	bridge.Stdin, bridge.Stdout, bridge.Stderr = bytes.NewReader(text), os.Stdout, os.Stderr
	return bridge.Run()
}

func install(subnetFile, plugins, configurations string) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	text, err := os.ReadFile(subnetFile)
	for ; errors.Is(err, fs.ErrNotExist); text, err = os.ReadFile(subnetFile) {
		select {
		case <-stop:
			return nil
		case <-time.After(lookEvery):
		}
	}
	if err != nil {
		return err
	}
	conf, err := configuration(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", subnetFile, err)
	}
	program, err := os.ReadFile(os.Args[0])
	if err != nil {
		return err
	}
	// The configuration is written last: after that the node is Ready.
	if err := put(filepath.Join(plugins, name), program, 0o755); err != nil {
		return err
	}
	if err := put(filepath.Join(configurations, "10-"+name+".conflist"), conf, 0o644); err != nil {
		return err
	}
	<-stop
	return nil
}

// put writes the file atomically.
func put(path string, data []byte, mode os.FileMode) error {
	if err := os.WriteFile(path+".new", data, mode); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func configuration(env string) ([]byte, error) {
	for line := range strings.Lines(env) {
		if subnet, ok := strings.CutPrefix(strings.TrimSpace(line), "FLANNEL_SUBNET="); ok {
			// It has the bridge's address in it, which is the gateway.
			at, bits, _ := strings.Cut(subnet, "/")
			return json.Marshal(map[string]any{"cniVersion": "1.0.0", "name": name, "plugins": []any{map[string]any{
				"type": name, "bridge": name, "isDefaultGateway": true, "hairpinMode": true,
				"ipam": map[string]any{"type": "host-local", "ranges": []any{[]any{map[string]any{"subnet": strings.TrimSuffix(at, ".1") + ".0/" + bits}}}},
			}}})
		}
	}
	return nil, errors.New("no FLANNEL_SUBNET in it")
}
