package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

const protoDir = "api/proto"

// protoPlugins make Go of the descriptors. They are tools of go.mod, so their
// versions are pinned like those of the libraries that their output calls.
var protoPlugins = []struct{ tool, parameter string }{
	{"protoc-gen-go", "module=" + module},
	{"protoc-gen-connect-go", "module=" + module},
}

// protoFiles makes the Go code of the machine API: path below the root → content.
// It needs nothing but Go: no protoc.
func protoFiles(ctx context.Context, root string) (map[string][]byte, error) {
	names, err := fs.Glob(os.DirFS(filepath.Join(root, protoDir)), "garboard/v1/*.proto")
	if err != nil {
		return nil, err
	}
	request, err := compile(ctx, root, names)
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	for _, plugin := range protoPlugins {
		request.Parameter = proto.String(plugin.parameter)
		if err := runPlugin(ctx, root, plugin.tool, request, files); err != nil {
			return nil, fmt.Errorf("%s: %w", plugin.tool, err)
		}
	}
	return files, nil
}

// compile makes what plugins read: descriptors of the files and of all that they
// import, imports first.
func compile(ctx context.Context, root string, names []string) (*pluginpb.CodeGeneratorRequest, error) {
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{filepath.Join(root, protoDir)}}),
		SourceInfoMode: protocompile.SourceInfoStandard, // comments go into the Go code
	}
	compiled, err := compiler.Compile(ctx, names...)
	if err != nil {
		return nil, err
	}
	request := &pluginpb.CodeGeneratorRequest{FileToGenerate: names}
	var seen []string
	var add func(f protoreflect.FileDescriptor) error
	add = func(f protoreflect.FileDescriptor) error {
		if slices.Contains(seen, f.Path()) {
			return nil
		}
		seen = append(seen, f.Path())
		for i := range f.Imports().Len() {
			if err := add(f.Imports().Get(i).FileDescriptor); err != nil {
				return err
			}
		}
		descriptor := protodesc.ToFileDescriptorProto(f)
		// Options come as messages that only the compiler knows; as bytes everyone does.
		data, err := proto.Marshal(descriptor)
		if err != nil {
			return err
		}
		plain := &descriptorpb.FileDescriptorProto{}
		if err := proto.Unmarshal(data, plain); err != nil {
			return err
		}
		request.ProtoFile = append(request.ProtoFile, plain)
		return nil
	}
	for _, f := range compiled {
		if err := add(f); err != nil {
			return nil, err
		}
	}
	return request, nil
}

func runPlugin(ctx context.Context, root, tool string, request *pluginpb.CodeGeneratorRequest, files map[string][]byte) error {
	input, err := proto.Marshal(request)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "tool", tool)
	cmd.Dir = root
	cmd.Stdin = bytes.NewReader(input)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(output, &response); err != nil {
		return err
	}
	if response.Error != nil {
		return errors.New(response.GetError())
	}
	for _, f := range response.File {
		files[f.GetName()] = []byte(f.GetContent())
	}
	return nil
}
