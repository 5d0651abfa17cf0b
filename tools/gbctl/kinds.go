package main

import (
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/api/client"
	"go.yaml.in/yaml/v3"
)

// Kinds of files that are easily mistaken for each other.
const (
	machineFile = "machine configuration"
	clientFile  = "client configuration"
)

// wrongKind is an error if a file is of another kind than a command takes.
func wrongKind(path string, text []byte, want string) error {
	var top map[string]any
	if yaml.Unmarshal(text, &top) != nil {
		return nil // who reads it has a better error
	}
	_, contexts := top["contexts"].(map[string]any)
	kind, use := "", ""
	switch {
	case top["kind"] == "Config" && top["clusters"] != nil:
		kind, use = "kubeconfig", "export KUBECONFIG="+shellWord(path)
	case top["apiVersion"] != nil && top["kind"] != nil:
		kind, use = "manifest of Kubernetes", "kubectl apply -f "+shellWord(path)
	case contexts:
		kind, use = clientFile, commandLine("config", "merge", path)
	case top["machine"] != nil || top["cluster"] != nil:
		kind, use = machineFile, "export GARBOARDCONFIG="+shellWord(filepath.Join(filepath.Dir(path), "garboardconfig"))
	}
	if kind == "" || kind == want {
		return nil
	}
	return usagef("%s is a %s, not a %s; did you mean '%s'?", path, kind, want, use)
}

// loadClient reads a client configuration.
func loadClient(path string) (*client.Config, error) {
	if text, err := os.ReadFile(path); err == nil {
		if err := wrongKind(path, text, clientFile); err != nil {
			return nil, err
		}
	}
	return client.Load(path)
}
