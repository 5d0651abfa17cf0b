package controlplane

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config"
)

// defaultFiles are the configuration files of kube-apiserver, unless the
// configuration replaces them.
//
//go:embed files
var defaultFiles embed.FS

const (
	admissionFile = "admission.yaml"
	auditFile     = "audit-policy.yaml"
)

// apiServerFiles are the configuration files of kube-apiserver without secrets, by name.
func apiServerFiles(c APIServerConfig) (map[string][]byte, error) {
	dir, err := fs.Sub(defaultFiles, "files/"+apiServer)
	if err != nil {
		return nil, err
	}
	names, err := fs.Glob(dir, "*")
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	for _, name := range names {
		if files[name], err = fs.ReadFile(dir, name); err != nil {
			return nil, err
		}
	}
	if c.AuditPolicy != "" {
		if files[auditFile], err = yaml.Marshal(c.AuditPolicy); err != nil {
			return nil, fmt.Errorf("render %s: %w", auditFile, err)
		}
	}
	if len(c.AdmissionControl) > 0 {
		if files[admissionFile], err = withPlugins(files[admissionFile], c.AdmissionControl); err != nil {
			return nil, fmt.Errorf("render %s: %w", admissionFile, err)
		}
	}
	return files, nil
}

// withPlugins is the file with the user's plugins, which replace those of the
// same name.
func withPlugins(file []byte, plugins []config.AdmissionPlugin) ([]byte, error) {
	var admission struct {
		APIVersion string   `yaml:"apiVersion"`
		Kind       string   `yaml:"kind"`
		Plugins    []object `yaml:"plugins"`
	}
	if err := yaml.Unmarshal(file, &admission); err != nil {
		return nil, err
	}
	for _, p := range plugins {
		admission.Plugins = slices.DeleteFunc(admission.Plugins, func(had object) bool { return had["name"] == p.Name })
		admission.Plugins = append(admission.Plugins, object{"name": p.Name, "configuration": p.Configuration})
	}
	return yaml.Marshal(admission)
}

// filesVersion is a hash of the files: kube-apiserver reads them only at its start.
func filesVersion(files map[string][]byte) string {
	h := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fmt.Fprintf(h, "%s %d\n", name, len(files[name]))
		h.Write(files[name])
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}
