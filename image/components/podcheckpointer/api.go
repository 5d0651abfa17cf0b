package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/image/components/podcheckpointer/checkpoint"
	"gopkg.in/yaml.v3"
)

// answerLimit is the size of the largest answer, in bytes.
const answerLimit = 64 << 20

// errNotFound is the error for an object that doesn't exist.
var errNotFound = errors.New("it doesn't exist")

// apiServer is a client of the Kubernetes API.
type apiServer struct {
	url    string
	client *http.Client
}

// kubeconfig is the part of a kubeconfig that is used: its first cluster and its first user.
type kubeconfig struct {
	Clusters []struct {
		Cluster struct {
			Server     string `yaml:"server"`
			ServerName string `yaml:"tls-server-name"`
			CA         string `yaml:"certificate-authority-data"`
			CAFile     string `yaml:"certificate-authority"`
		} `yaml:"cluster"`
	} `yaml:"clusters"`
	Users []struct {
		User struct {
			Cert     string `yaml:"client-certificate-data"`
			CertFile string `yaml:"client-certificate"`
			Key      string `yaml:"client-key-data"`
			KeyFile  string `yaml:"client-key"`
		} `yaml:"user"`
	} `yaml:"users"`
}

// newAPIServer reads a kubeconfig with a client certificate.
func newAPIServer(path string) (*apiServer, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var k kubeconfig
	if err := yaml.Unmarshal(data, &k); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(k.Clusters) == 0 || len(k.Users) == 0 {
		return nil, fmt.Errorf("%s: no cluster or no user in it", path)
	}
	cluster, user := k.Clusters[0].Cluster, k.Users[0].User
	var parts [3][]byte
	for i, part := range [][2]string{{cluster.CA, cluster.CAFile}, {user.Cert, user.CertFile}, {user.Key, user.KeyFile}} {
		if parts[i], err = inlineOrFile(part[0], part[1], filepath.Dir(path)); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	pair, err := tls.X509KeyPair(parts[1], parts[2])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(parts[0])
	return &apiServer{url: cluster.Server, client: &http.Client{
		Timeout: timeout,
		// HTTP/1: after a timeout the connection is closed, and the next request may reach
		// another API server.
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, ServerName: cluster.ServerName},
			TLSNextProto:    map[string]func(string, *tls.Conn) http.RoundTripper{},
		},
	}}, nil
}

// inlineOrFile decodes data, or reads a file, which may be relative to dir.
func inlineOrFile(data, file, dir string) ([]byte, error) {
	if data != "" {
		return base64.StdEncoding.DecodeString(data)
	}
	if !filepath.IsAbs(file) {
		file = filepath.Join(dir, file)
	}
	return os.ReadFile(file)
}

func (a *apiServer) get(ctx context.Context, path string, to any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.url+path, nil)
	if err != nil {
		return err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, answerLimit))
	switch {
	case err != nil:
		return err
	case resp.StatusCode == http.StatusNotFound:
		return fmt.Errorf("%s: %w", path, errNotFound)
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("%s: %s: %.200s", path, resp.Status, body)
	}
	return json.Unmarshal(body, to)
}

// parents returns the pods of a node that are to have a checkpoint.
func (a *apiServer) parents(ctx context.Context, node string) ([]checkpoint.Object, error) {
	var list struct {
		Items []checkpoint.Object `json:"items"`
	}
	if err := a.get(ctx, "/api/v1/pods?fieldSelector="+url.QueryEscape("spec.nodeName="+node), &list); err != nil {
		return nil, err
	}
	var parents []checkpoint.Object
	for _, pod := range list.Items {
		if checkpoint.IsParent(pod) {
			parents = append(parents, pod)
		}
	}
	return parents, nil
}

// files returns the files of a Secret or a ConfigMap, by name.
func (a *apiServer) files(ctx context.Context, namespace string, s checkpoint.Source) (map[string][]byte, error) {
	var object struct {
		Data       json.RawMessage   `json:"data"`
		BinaryData map[string][]byte `json:"binaryData"`
	}
	err := a.get(ctx, "/api/v1/namespaces/"+namespace+"/"+s.Kind+"/"+s.Name, &object)
	if errors.Is(err, errNotFound) && s.Optional {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	values := map[string][]byte{}
	if s.Kind == "secrets" { // their values are in base64, which is how bytes are decoded
		err = unmarshalSome(object.Data, &values)
	} else {
		var texts map[string]string
		err = unmarshalSome(object.Data, &texts)
		for key, value := range texts {
			values[key] = []byte(value)
		}
		maps.Copy(values, object.BinaryData)
	}
	if err != nil {
		return nil, err
	}
	files, err := s.Files(values)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", s.Kind, s.Name, err)
	}
	return files, nil
}

// unmarshalSome decodes a field that may be missing.
func unmarshalSome(data json.RawMessage, to any) error {
	if len(data) == 0 {
		return nil
	}
	return json.Unmarshal(data, to)
}
